"""Countries, US states and their capitals.

A line is: name | capital | aliases; … | other accepted answers; …
"""

COUNTRIES = {
    "Africa": """\
Algeria|Algiers
Angola|Luanda
Benin|Porto-Novo||Cotonou
Botswana|Gaborone
Burkina Faso|Ouagadougou
Burundi|Gitega
Cameroon|Yaoundé
Cape Verde|Praia|Cabo Verde
the Central African Republic|Bangui
Chad|N'Djamena||Ndjamena
the Comoros|Moroni
the Democratic Republic of the Congo|Kinshasa|the DRC;Congo-Kinshasa;DR Congo
the Republic of the Congo|Brazzaville|Congo-Brazzaville
Djibouti|Djibouti City||Djibouti
Egypt|Cairo
Equatorial Guinea|Malabo||Ciudad de la Paz
Eritrea|Asmara
Eswatini|Mbabane|Swaziland|Lobamba
Ethiopia|Addis Ababa
Gabon|Libreville
the Gambia|Banjul
Ghana|Accra
Guinea|Conakry
Guinea-Bissau|Bissau
Ivory Coast|Yamoussoukro|Côte d'Ivoire|Abidjan
Kenya|Nairobi
Lesotho|Maseru
Liberia|Monrovia
Libya|Tripoli
Madagascar|Antananarivo
Malawi|Lilongwe
Mali|Bamako
Mauritania|Nouakchott
Mauritius|Port Louis
Morocco|Rabat
Mozambique|Maputo
Namibia|Windhoek
Niger|Niamey
Nigeria|Abuja
Rwanda|Kigali
São Tomé and Príncipe|São Tomé
Senegal|Dakar
Seychelles|Victoria|the Seychelles
Sierra Leone|Freetown
Somalia|Mogadishu
South Africa|Pretoria||Cape Town;Bloemfontein
South Sudan|Juba
Sudan|Khartoum
Tanzania|Dodoma
Togo|Lomé
Tunisia|Tunis
Uganda|Kampala
Zambia|Lusaka
Zimbabwe|Harare
""",
    "Asia": """\
Afghanistan|Kabul
Armenia|Yerevan
Azerbaijan|Baku
Bahrain|Manama
Bangladesh|Dhaka
Bhutan|Thimphu
Brunei|Bandar Seri Begawan
Cambodia|Phnom Penh
China|Beijing|the People's Republic of China
Cyprus|Nicosia
East Timor|Dili|Timor-Leste
Georgia|Tbilisi|the country Georgia;the country of Georgia
India|New Delhi||Delhi
Indonesia|Jakarta||Nusantara
Iran|Tehran
Iraq|Baghdad
Israel|Jerusalem
Japan|Tokyo
Jordan|Amman
Kazakhstan|Astana
Kuwait|Kuwait City
Kyrgyzstan|Bishkek
Laos|Vientiane
Lebanon|Beirut
Malaysia|Kuala Lumpur
the Maldives|Malé
Mongolia|Ulaanbaatar||Ulan Bator
Myanmar|Naypyidaw|Burma
Nepal|Kathmandu
North Korea|Pyongyang
Oman|Muscat
Pakistan|Islamabad
Palestine|Ramallah||East Jerusalem;Jerusalem
the Philippines|Manila
Qatar|Doha
Saudi Arabia|Riyadh
Singapore|Singapore
South Korea|Seoul
Sri Lanka|Sri Jayawardenepura Kotte||Colombo;Kotte
Syria|Damascus
Taiwan|Taipei
Tajikistan|Dushanbe
Thailand|Bangkok
Turkmenistan|Ashgabat
the United Arab Emirates|Abu Dhabi|the UAE
Uzbekistan|Tashkent
Vietnam|Hanoi
Yemen|Sanaa||Sana'a;Aden
""",
    "both Europe and Asia": """\
Russia|Moscow|the Russian Federation
Turkey|Ankara|Türkiye
""",
    "Europe": """\
Albania|Tirana
Andorra|Andorra la Vella
Austria|Vienna
Belarus|Minsk
Belgium|Brussels
Bosnia and Herzegovina|Sarajevo|Bosnia
Bulgaria|Sofia
Croatia|Zagreb
the Czech Republic|Prague|Czechia
Denmark|Copenhagen
Estonia|Tallinn
Finland|Helsinki
France|Paris
Germany|Berlin
Greece|Athens
Hungary|Budapest
Iceland|Reykjavik
Ireland|Dublin|the Republic of Ireland
Italy|Rome
Kosovo|Pristina
Latvia|Riga
Liechtenstein|Vaduz
Lithuania|Vilnius
Luxembourg|Luxembourg City||Luxembourg
Malta|Valletta
Moldova|Chisinau
Monaco|Monaco
Montenegro|Podgorica
the Netherlands|Amsterdam|Holland
North Macedonia|Skopje|Macedonia
Norway|Oslo
Poland|Warsaw
Portugal|Lisbon
Romania|Bucharest
San Marino|the City of San Marino||San Marino
Serbia|Belgrade
Slovakia|Bratislava
Slovenia|Ljubljana
Spain|Madrid
Sweden|Stockholm
Switzerland|Bern
Ukraine|Kyiv||Kiev
the United Kingdom|London|the UK;Britain;Great Britain
Vatican City|Vatican City|the Vatican
""",
    "North America": """\
Antigua and Barbuda|Saint John's||St. John's
the Bahamas|Nassau
Barbados|Bridgetown
Belize|Belmopan
Canada|Ottawa
Costa Rica|San José
Cuba|Havana
Dominica|Roseau
the Dominican Republic|Santo Domingo
El Salvador|San Salvador
Grenada|Saint George's||St. George's
Guatemala|Guatemala City
Haiti|Port-au-Prince
Honduras|Tegucigalpa
Jamaica|Kingston
Mexico|Mexico City
Nicaragua|Managua
Panama|Panama City
Saint Kitts and Nevis|Basseterre|St. Kitts and Nevis
Saint Lucia|Castries|St. Lucia
Saint Vincent and the Grenadines|Kingstown|St. Vincent and the Grenadines
Trinidad and Tobago|Port of Spain|Trinidad
the United States|Washington, D.C.|the USA;the US;America;the United States of America|Washington
""",
    "South America": """\
Argentina|Buenos Aires
Bolivia|Sucre||La Paz
Brazil|Brasília
Chile|Santiago
Colombia|Bogotá
Ecuador|Quito
Guyana|Georgetown
Paraguay|Asunción
Peru|Lima
Suriname|Paramaribo
Uruguay|Montevideo
Venezuela|Caracas
""",
    "Oceania": """\
Australia|Canberra
Fiji|Suva
Kiribati|South Tarawa||Tarawa
the Marshall Islands|Majuro
Micronesia|Palikir|the Federated States of Micronesia
Nauru|Yaren
New Zealand|Wellington
Palau|Ngerulmud
Papua New Guinea|Port Moresby
Samoa|Apia
the Solomon Islands|Honiara
Tonga|Nuku'alofa||Nukualofa
Tuvalu|Funafuti
Vanuatu|Port Vila
""",
}

STATES = """\
Alabama|Montgomery
Alaska|Juneau
Arizona|Phoenix
Arkansas|Little Rock
California|Sacramento
Colorado|Denver
Connecticut|Hartford
Delaware|Dover
Florida|Tallahassee
Georgia|Atlanta
Hawaii|Honolulu
Idaho|Boise
Illinois|Springfield
Indiana|Indianapolis
Iowa|Des Moines
Kansas|Topeka
Kentucky|Frankfort
Louisiana|Baton Rouge
Maine|Augusta
Maryland|Annapolis
Massachusetts|Boston
Michigan|Lansing
Minnesota|Saint Paul||St. Paul
Mississippi|Jackson
Missouri|Jefferson City
Montana|Helena
Nebraska|Lincoln
Nevada|Carson City
New Hampshire|Concord
New Jersey|Trenton
New Mexico|Santa Fe
New York|Albany
North Carolina|Raleigh
North Dakota|Bismarck
Ohio|Columbus
Oklahoma|Oklahoma City
Oregon|Salem
Pennsylvania|Harrisburg
Rhode Island|Providence
South Carolina|Columbia
South Dakota|Pierre
Tennessee|Nashville
Texas|Austin
Utah|Salt Lake City
Vermont|Montpelier
Virginia|Richmond
Washington|Olympia
West Virginia|Charleston
Wisconsin|Madison
Wyoming|Cheyenne
"""
